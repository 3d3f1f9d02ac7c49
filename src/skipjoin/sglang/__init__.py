"""`adaptive`'s order of waiting requests inside SGLang: `SKIPJOIN_SGLANG=adaptive`."""
