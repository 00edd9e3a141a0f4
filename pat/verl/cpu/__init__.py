"""What VeRL lacks to train on machines without an accelerator."""
