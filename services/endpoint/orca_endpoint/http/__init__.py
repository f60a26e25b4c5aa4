"""All that any HTTP caller meets: connections, keys, bodies, answers and their errors."""
