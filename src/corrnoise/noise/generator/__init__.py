"""The generator: a key, the ChaCha20 words of its stream, and the normals computed from them."""
