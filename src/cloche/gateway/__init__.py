"""The loop between an upstream's model and the engine: what is behind `/v1/responses` and `/v1/chat/completions`.

It knows no HTTP of its clients. Its language is the items of the Responses API (`items`), since those say everything
that the other protocols can say; `events` has the events of a turn.
"""
