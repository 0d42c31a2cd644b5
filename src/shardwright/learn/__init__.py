"""Pages that teach the ideas of large training, one idea a page, in English and Chinese, and their figures."""
