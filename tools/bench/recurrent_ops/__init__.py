"""Cases, contenders and tables of `recurrent.py`."""
