"""A page on this machine to plan a job by hand: the server and its answers; `page` is what the browser shows."""
