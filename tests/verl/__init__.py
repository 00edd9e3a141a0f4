"""Tests; a package, because the wheel of verl brings a package of the same name."""
