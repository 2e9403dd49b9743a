"""Code that several tests share. A test module imports it from here, and nothing from another test module."""
