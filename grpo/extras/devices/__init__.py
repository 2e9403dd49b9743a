"""Several devices: replicas (DDP) or parts (FSDP2) of the policy. Door: `strategy`."""
