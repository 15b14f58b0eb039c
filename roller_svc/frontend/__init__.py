"""Front end: expression text and models → TensorProgram."""
