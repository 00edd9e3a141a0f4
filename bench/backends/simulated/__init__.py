"""A rollout on a logical clock: SGLang's continuous batching over measured step times, under any policy."""
