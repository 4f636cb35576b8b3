"""`python -m tests.golden`: predicted against planned for every attention family, as a table for the benchmarks."""

from __future__ import annotations

from relevo.setup.libraries import find
from tests.golden.comparison import error_table


def main() -> None:
    """Print the table. Takes about two minutes."""
    print(error_table(find()))


if __name__ == "__main__":
    main()
