"""NumPy's archives (np.savez, np.savez_compressed), read in parts."""
