"""`python -m adaattn_hf.backends.native`: build the library (again) where the package lies."""

import sys

from .build import main

sys.exit(main())
