"""What Relevo fetches for itself: native libraries and the demo model, checked and kept in one cache for all clones."""
