"""Start a worker: choose kernels, size the cache, warm up, capture CUDA graphs."""
