"""What `relevo plan` and `relevo models add` say of a file before it is loaded: figures, verdicts, checks."""
