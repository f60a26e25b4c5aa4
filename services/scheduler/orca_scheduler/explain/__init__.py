"""Why a request took as long as it did: the journals' events, read as the story of one request."""
