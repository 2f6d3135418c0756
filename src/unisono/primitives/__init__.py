"""torch's four verbs, scatter, replicate, parallel_apply and gather, what they are made of, and looks at objects."""
