"""kvcached 0.1.6: the limit of an engine whose KV memory is mapped on demand."""
