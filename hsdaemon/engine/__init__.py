"""SGLang without importing it: releases as data, argument line, environment, patches."""
