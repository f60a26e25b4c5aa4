"""JSON schemas of answers: rewritten into what is kept, or refused by the place of the keyword that is not."""
