"""The benchmark behind `manyhands bench`: our engines and the alternatives, measured in turn."""
