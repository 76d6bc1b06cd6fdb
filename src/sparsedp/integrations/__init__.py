"""Other people's loops and logs: each file needs the package it is named after, and nothing else imports it."""
