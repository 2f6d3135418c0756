"""The benchmark behind `manyhands bench`: our engines beside what else there is, measured in turn."""
