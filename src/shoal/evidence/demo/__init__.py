"""The demonstration behind `shoal demo`: 64 small networks on handwritten digits, alone and packed."""
