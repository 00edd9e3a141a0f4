"""bench e2e: GRPO iterations of real VeRL, one rollout arm beside the other."""
