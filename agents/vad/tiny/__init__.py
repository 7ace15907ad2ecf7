"""TinyVAD: a small causal network that hears speech in the noise of telephones."""
