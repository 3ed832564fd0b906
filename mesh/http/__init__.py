"""HTTP/1.1 for the services of the mesh: a server made for many small streams, and failures in OpenAI's shape."""
