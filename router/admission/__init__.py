"""What a request must be before it is placed: valid fields, a tenant with quota, its turn among those that wait."""
