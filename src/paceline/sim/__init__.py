"""The same decisions in virtual time: turns traces, policies and a model into curves of accuracy. Pure."""
