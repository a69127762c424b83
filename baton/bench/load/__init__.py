"""`baton bench serve`: a load generator of several processes for a Baton router or an OpenAI endpoint."""
