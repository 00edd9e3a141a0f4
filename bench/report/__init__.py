"""Reports: markdown and plots, made from raw records alone."""
