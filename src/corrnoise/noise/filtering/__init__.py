"""C⁻¹ as a filter of the stream, and the schemes that trade memory for time."""
