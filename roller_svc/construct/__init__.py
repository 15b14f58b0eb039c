"""ROLLER's construction: KernelGroup → aligned rPrograms, by scale-up and scale-out."""
