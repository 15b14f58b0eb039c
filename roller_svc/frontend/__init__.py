"""Program text and models → TensorProgram."""
