"""The evaluation behind the claims: every trace, task, method and seed in virtual time with real gradients."""
