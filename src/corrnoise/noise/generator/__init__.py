"""The generator: a key, the ChaCha20 words of its stream, and normals made of them."""
