"""KV cache: sliding-window state, paged compressed entries, and their bookkeeping."""
