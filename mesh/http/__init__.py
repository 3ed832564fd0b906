"""HTTP/1.1 for the services of the mesh: a server made for many small streams, and failures in OpenAI's shape.

A small service needs a table of routes and a place to listen:

    async def scale(request: Request) -> Reply:
        asked = request.json(ScaleRequest)  # a msgspec type; a bad body gets a 400
        if asked.count > most:
            raise InvalidRequestError(f"at most {most} workers fit", param="count")  # a 400 with OpenAI's error body
        return json_reply(await crew.scale(asked.count))  # any other exception is logged and gets a 500

    app = App([Route("POST", "/pools/{name}/scale", scale)], HttpLimits(max_body_bytes=64 << 10))
    async with listening_unix(app, path) as url:  # or `listening(app, host, port)`
        await stop.wait()

`request.params` holds the parts of the path (`name` here), `request.query` the query, `App.guard` checks the head
of every request, for example its token. A handler that streams calls `request.open_stream`.
"""
