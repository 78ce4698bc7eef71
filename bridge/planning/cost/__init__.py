"""Memory and traffic of a model under a policy."""
