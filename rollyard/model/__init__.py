"""What trainer and embedded engine share: architectures, the packed forward pass, the chunked head, reading and writing folders."""
