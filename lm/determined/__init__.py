"""The Determined platform: Core API's distributed context, and the master."""
