"""`baton bench serve`: a load generator against a Baton or an OpenAI endpoint, from several processes."""
