"""The request plane: many calls on one TCP connection, each answered by a stream of messages."""
