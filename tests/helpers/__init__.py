"""What several tests share. A test module imports from here, and never from another test module."""
