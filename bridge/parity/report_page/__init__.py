"""The report: text, pictures and an HTML page."""
