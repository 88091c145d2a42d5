"""Files and folders: bounded readers and a crash-safe writer that know nothing of quantization."""
