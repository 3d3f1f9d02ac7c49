"""Load tests of a running server over HTTP."""
