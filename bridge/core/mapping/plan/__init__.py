"""What a whole mapping makes of a whole checkpoint, and the reader that carries it out."""
