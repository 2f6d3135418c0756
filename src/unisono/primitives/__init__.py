"""torch's four verbs, scatter, replicate, parallel_apply and gather, and what they are made of."""
