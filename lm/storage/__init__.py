"""Folders that appear complete, and what a user's runs keep of what they have computed."""
