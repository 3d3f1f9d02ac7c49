"""Layer operations other than attention."""
