"""What trainer and embedded engine share: architectures, packed forward pass, chunked head, model folders."""
