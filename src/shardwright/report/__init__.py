"""Reports: texts and JSON of the commands; timelines in the terminal, as a page, as a picture, as a trace; launches."""
